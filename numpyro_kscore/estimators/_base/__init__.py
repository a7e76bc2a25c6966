"""Base scores: what an estimate is shrunk to, and the coordinates they are fitted in."""
