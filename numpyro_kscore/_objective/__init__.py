"""``ImplicitELBO``, its options and the gradient behind it."""
