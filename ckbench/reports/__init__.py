"""Report formats: one file each, a Table in and text out. No torch here."""
