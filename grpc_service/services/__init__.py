"""The services of triolet.v1: one file for each service, and the codecs between proto and
engine."""
