"""Many runs as one study: comparisons, and the recipes of the papers."""
