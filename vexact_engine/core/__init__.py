"""What is computed next and where it lies: no torch in here."""
