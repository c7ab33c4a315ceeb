"""The table exchange: the joint model in tuples on servers, which live on the workers."""
