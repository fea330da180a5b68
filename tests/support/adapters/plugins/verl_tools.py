"""The tools of verl's agent loop (``function_tool_path``)."""

from verl.tools.function_tool import function_tool


@function_tool
def search(to: str) -> str:
    """Search flights.

    Args:
        to: destination airport.
    """
    return "UA1 420 USD, DL9 380 USD, XX0 500 USD"


@function_tool
def book(flight: str) -> str:
    """Book a flight.

    Args:
        flight: its number.
    """
    return f"booked {flight}"
