"""Examples: scripts that show what the library does, in folders by purpose."""
