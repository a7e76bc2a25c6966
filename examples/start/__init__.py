"""First steps: fits, diagnostics, plates and priors made of draws."""
