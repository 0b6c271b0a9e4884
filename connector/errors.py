"""What the connector may raise, and only while a node starts.

    ConnectorError
    ├── ConfigError        a setting that cannot work, or a vLLM that does not fit; the sentence names it
    └── SideChannelError   the side-channel address cannot be bound

Nothing that arrives in a request raises: it is refused, see `connector.ticket.Reason`.
"""


class ConnectorError(Exception):
    """Base of everything that this package raises."""


class ConfigError(ConnectorError):
    """A setting of this node that cannot work, or a version of vLLM, named in a sentence."""


class SideChannelError(ConnectorError):
    """The side-channel address is in use or cannot be bound."""
