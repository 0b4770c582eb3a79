"""Training: one visible loop over steps that mine first and differentiate after."""
