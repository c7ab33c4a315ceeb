"""How the bytes move: the mesh's rounds, and the links that carry them."""
