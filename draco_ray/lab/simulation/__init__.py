"""Steps of a recorded run at other sizes, as discrete events: `draco plan --simulate`."""
