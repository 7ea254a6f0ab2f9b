"""What the outer loop costs in loss and saves in traffic, against synchronous training at equal tokens."""
