"""How close fitted guides and estimated scores are to the truth."""
