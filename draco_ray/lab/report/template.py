"""The pages' templates: what the reports write is escaped, and characters that cannot be seen are made visible."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from draco_ray.lab.report.svg import visible

ASSETS = files("draco_ray.lab.report") / "assets"


def page_template(name: str) -> Template:
    """A template of the assets folder, with ``style`` and the time ``made``."""
    environment = Environment(
        loader=PackageLoader("draco_ray.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
    )
    style = Markup((ASSETS / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(name, globals={"style": style, "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"})
