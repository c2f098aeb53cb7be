//! Whether this node takes what it is offered.
