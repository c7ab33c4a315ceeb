"""Opaque messages between addresses: zmq sockets, queues in memory, and reliable delivery over either."""
