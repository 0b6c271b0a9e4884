"""What an operator decides: frozen models (`model`), read once from a file, the environment and flags (`load`).

`Settings` is what the rest of the proxy takes. It is valid once it exists: `load` raises `SettingsError` otherwise.
"""

from pdproxy.settings.choices import (
    Credential,
    DiscoveryKind,
    FirstHandOver,
    LogFormat,
    LogLevel,
    NodeRole,
    OnPrefillFailure,
    OtelExport,
    Scheme,
)
from pdproxy.settings.model import (
    Deadlines,
    Discovery,
    Health,
    Keys,
    Limits,
    Listen,
    Log,
    NodeEntry,
    Otel,
    Policy,
    Settings,
    Upstream,
)

__all__ = [
    "Credential",
    "Deadlines",
    "Discovery",
    "DiscoveryKind",
    "FirstHandOver",
    "Health",
    "Keys",
    "Limits",
    "Listen",
    "Log",
    "LogFormat",
    "LogLevel",
    "NodeEntry",
    "NodeRole",
    "OnPrefillFailure",
    "Otel",
    "OtelExport",
    "Policy",
    "Scheme",
    "Settings",
    "Upstream",
]
