"""What every room shares: backends, argument checks, operator registration, numerics, the native extension."""
