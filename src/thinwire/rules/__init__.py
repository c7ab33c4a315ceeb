"""The papers' equations as pure functions on tensors, one module a family."""
