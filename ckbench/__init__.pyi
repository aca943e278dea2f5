"""The public names, for editors and type checkers; at run time they load with their first use."""

from ckbench.api import frame as frame
from ckbench.api import load as load
from ckbench.api import run as run
from ckbench.engine.applying import apply_plan as apply_plan

__version__: str
