"""Islands: programs of one rank that a person wrote by hand, inside a graph that is planned."""
