"""One module per main app; a class per scenario family. ``scripts.families()`` lists them."""
