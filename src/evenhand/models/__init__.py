"""Query encoders and the table of label vectors."""
