"""What a server measures, in Prometheus' form. Names begin with kvdb_, units are base units, and labels have few values."""
