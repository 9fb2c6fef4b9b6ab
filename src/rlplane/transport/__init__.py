"""Typed messages between processes over ZeroMQ; knows no message type and nothing of data planes.

``codec``     what a codec is, and how topic and payload share a frame
``protocol``  what publishers and subscribers promise
``pubsub``    both of them over ZeroMQ
``curve``     the same between machines: encrypted, and only with a key
``gate``      who may ask an HTTP server of ours: tokens, names, connections that ask for nothing
"""

from rlplane.transport.codec import TOPIC_FRAME_SIZE, MessageCodec, make_topic
from rlplane.transport.protocol import MessagePublisher, MessageSubscriber
from rlplane.transport.pubsub import Pattern, ZmqMessagePublisher, ZmqMessageSubscriber, check_address

__all__ = [
    "TOPIC_FRAME_SIZE",
    "MessageCodec",
    "MessagePublisher",
    "MessageSubscriber",
    "Pattern",
    "ZmqMessagePublisher",
    "ZmqMessageSubscriber",
    "check_address",
    "make_topic",
]
