"""Workers of one kind that come and go: how many there are, which takes a call, what becomes of a lost one's."""
