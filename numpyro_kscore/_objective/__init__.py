"""``ImplicitELBO`` and what it is made of."""
