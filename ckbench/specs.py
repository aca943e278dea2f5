"""Strategy specs: read ``name``, ``name:arg`` or a mapping with options, and resolve them to Plans."""

import re
from dataclasses import Field, fields, replace
from typing import Any

from ckbench import registry
from ckbench.config import StrategySpec
from ckbench.errors import ConfigError, PlanError
from ckbench.plan import Plan, StackShape

OPTIONS = ("skip_last", "early_stop", "preserve_rng", "reentrant", "offload")
MAX_PARAMETER = 10**9
MAX_WORD_CHARS = 400
DEFAULTS = {"skip_last": False, "early_stop": True, "preserve_rng": True, "reentrant": False, "offload": False}
OFFLOAD_SUFFIX = "+offload"
"""``per-block+offload`` is how people write ``per-block,offload``."""

_BOOL_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_SYNONYMS = {"use_reentrant": "reentrant", "preserve_rng_state": "preserve_rng"}


def parse(value: Any) -> StrategySpec:
    """Read one spec as it comes from YAML or the command line.

    Text: ``name[:ARG][+offload][,option[=true|false]]...``. Mapping: ``{name: ..., PARAM: ..., option: true}``.
    Raises ConfigError with a sentence; the caller knows file and line.
    """
    if value is None:
        raise ConfigError("strategy is null (~, null or empty); write the word none")
    if isinstance(value, bool):
        word = "true" if value else "false"
        raise ConfigError(f"strategy got the boolean {word}; write none to keep everything (quote the word)")
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, dict):
        return _from_mapping(value)
    raise ConfigError(f"a strategy is a name or a mapping with a name, got {value!r}")


def _from_text(text: str) -> StrategySpec:
    text, is_repeat, number = text.partition("#")
    if is_repeat:
        if not re.fullmatch(r"[1-9]\d{0,5}", number):
            raise ConfigError(f"strategy '{text}#{number}': after # comes the number of the repeat, as in none#2")
        return _from_text(text).model_copy(update={"repeat": int(number)})
    head, *option_texts = (part.strip() for part in text.split(","))
    if head.endswith(OFFLOAD_SUFFIX):
        head = head.removesuffix(OFFLOAD_SUFFIX)
        option_texts.insert(0, "offload")
    name, _, argument = head.partition(":")
    if not name:
        raise ConfigError("strategy is empty; write the word none")
    items: dict[str, Any] = {"name": name}
    cls = registry.load("strategies", name)
    if argument:
        known = fields(cls)
        if not known:
            raise ConfigError(f"strategy {registry.spell(name)} takes no argument, got {argument!r}")
        items[known[0].name] = _read_argument(head, known[0], argument)
    elif ":" in head:
        raise ConfigError(f"strategy {head!r} ends in a colon; write {name}:ARG or {name}")
    for option_text in option_texts:
        key, equals, word = option_text.partition("=")
        key = key.strip()
        if key in items:
            raise ConfigError(f"strategy {text!r} gives {key!r} twice")
        if equals and word.strip().lower() not in _BOOL_WORDS:
            raise ConfigError(f"strategy {text!r}: {key} must be true or false, got {word.strip()!r}")
        items[key] = _BOOL_WORDS[word.strip().lower()] if equals else True
    return _from_mapping(items)


def _from_mapping(items: dict[str, Any]) -> StrategySpec:
    name = items.get("name")
    if name is None or isinstance(name, bool):
        raise ConfigError("a strategy mapping needs a name, for example {name: per-block, skip_last: true}")
    if not isinstance(name, str):
        raise ConfigError(f"a strategy name is a word, got {name!r}")
    if ":" in name or "," in name:
        raise ConfigError(f"in a mapping, name is the bare name; give parameters and options as keys, not {name!r}")
    name = registry.spell(name)
    known = {field.name: field for field in fields(registry.load("strategies", name))}
    params: dict[str, int | float | str] = {}
    options: dict[str, bool] = {}
    for key, value in items.items():
        if key == "name":
            continue
        if key in OPTIONS:
            if not isinstance(value, bool):
                raise ConfigError(f"strategy {name}: {key} must be true or false, got {value!r}")
            options[key] = value
        elif key in known:
            value = _check_parameter(name, known[key], value)
            params[key] = value
        else:
            hint = (
                f"; did you mean {_SYNONYMS[key]!r}?"
                if key in _SYNONYMS
                else registry.did_you_mean(key, [*known, *OPTIONS])
            )
            raise ConfigError(f"strategy {name}: unknown key {key!r}{hint}")
    missing = [key for key in known if key not in params]
    if missing:
        raise ConfigError(f"strategy {name} needs {', '.join(missing)}; write {name}:{missing[0].upper()}")
    if name == "none" and options.get("offload"):
        raise ConfigError("none with offload is the strategy offload; write that")
    if name == "none" and options:
        raise ConfigError(f"strategy none recomputes nothing, so {', '.join(sorted(options))} has no effect")
    if options and not getattr(registry.load("strategies", name), "takes_options", True):
        raise ConfigError(f"strategy {name} decides all of its plan, so {', '.join(sorted(options))} has no effect")
    explicit = {key: value for key, value in options.items() if value != DEFAULTS[key]}
    return StrategySpec(name=name, params={key: params[key] for key in known}, options=explicit)


def _read_argument(head: str, parameter: Field[Any], text: str) -> int | float | str:
    """Read the argument of ``name:ARG`` as the strategy declares it."""
    if parameter.type is str:
        return text
    if parameter.type is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"strategy {head!r}: {parameter.name} must be a number, got {text!r}") from None
    if not re.fullmatch(r"\d{1,40}", text):
        raise ConfigError(f"strategy {head!r}: {parameter.name} must be a whole number of at least 1, got {text!r}")
    return int(text)


def _check_parameter(name: str, parameter: Field[Any], value: Any) -> int | float | str:
    """Check one parameter by its declared type; its meaning is the strategy's to check."""
    key = parameter.name
    if parameter.type is str:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            value = "+".join(value)
        if not isinstance(value, str) or not re.fullmatch(rf"[\w.:+@%/ ~-]{{1,{MAX_WORD_CHARS}}}", value):
            raise ConfigError(f"strategy {name}: {key} must be a word or a list of words, got {value!r}")
        return value
    if parameter.type is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_PARAMETER:
            raise ConfigError(f"strategy {name}: {key} must be a number of at least 0, got {value!r}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"strategy {name}: {key} must be a whole number of at least 1, got {value!r}")
    if value > MAX_PARAMETER:
        raise ConfigError(f"strategy {name}: {key} must be at most {MAX_PARAMETER}, got {value}")
    return value


def number_repeats(specs: list[StrategySpec]) -> tuple[StrategySpec, ...]:
    """Number a strategy that is listed again, so that it is measured again and not taken for an alias."""
    taken: set[str] = set()
    numbered = []
    for spec in specs:
        repeat = spec.repeat
        while spec.model_copy(update={"repeat": repeat}).label in taken:
            repeat += 1
        spec = spec.model_copy(update={"repeat": repeat})
        taken.add(spec.label)
        numbered.append(spec)
    return tuple(numbered)


def resolve(spec: StrategySpec, stack: StackShape) -> Plan:
    """Give the Plan of a spec for one stack. Raises PlanError where it cannot work."""
    plan: Plan = registry.load("strategies", spec.name)(**spec.params).plan(stack)
    options = {**DEFAULTS, **spec.options}
    if options["offload"] and (plan.native or plan.compile_budget is not None):
        raise PlanError(f"{spec.name} decides inside the library or the compiler; offload cannot be added to it")
    if options["offload"] and plan.host_spans:
        raise PlanError(f"{spec.name} offloads already; leave the option out")
    if any(region.mode == "invert" for region in plan.walk()):
        idle = [key for key in OPTIONS if key != "preserve_rng" and options[key] != DEFAULTS[key]]
        if idle:
            kept = f"{spec.name} keeps the stack's output alone and rebuilds every input from it"
            raise PlanError(f"{kept}, so {', '.join(idle)} has nothing to act on; leave it out")
    if not plan.regions:
        idle = [key for key in OPTIONS if key != "offload" and options[key] != DEFAULTS[key]]
        if idle:
            raise PlanError(
                f"{spec.name} has no region of ours, so {', '.join(idle)} has nothing to act on; leave it out"
            )
    if options["reentrant"] and not options["early_stop"]:
        raise PlanError("reentrant checkpoints never stop early, so early_stop has nothing to act on; leave it out")
    if options.pop("skip_last"):
        plan = plan.without_last_leaf()
    plan = replace(plan, offload=plan.offload or options["offload"])
    if not plan.regions:
        return plan
    asked = {key: value for key, value in spec.options.items() if key in ("early_stop", "preserve_rng", "reentrant")}
    return replace(plan, **asked)  # type: ignore[arg-type]
