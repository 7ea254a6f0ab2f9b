"""How many contributions a second the bare state machine of the rounds takes in."""
