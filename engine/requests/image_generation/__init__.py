"""GenerateImage requests: their values, preparation and streams."""
