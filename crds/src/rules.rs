//! Parts of CEL rules about commands, for every kind whose spec carries them.

/// That a part of the spec is unchanged, had no command's id, or its command is on record.
macro_rules! recorded {
    ($part:literal) => {
        concat!(
            "(!has(oldSelf.spec.",
            $part,
            ") || !has(oldSelf.spec.",
            $part,
            ".requestId)",
            " || (has(self.spec.",
            $part,
            ") && self.spec.",
            $part,
            " == oldSelf.spec.",
            $part,
            ")",
            " || (has(oldSelf.status) && has(oldSelf.status.commands)",
            " && oldSelf.status.commands.exists(c, c.id == oldSelf.spec.",
            $part,
            ".requestId)))",
        )
    };
}

/// That a part of the spec carries no id, the id that it had, or one that no command on record has.
macro_rules! fresh {
    ($part:literal) => {
        concat!(
            "(!has(self.spec.",
            $part,
            ") || !has(self.spec.",
            $part,
            ".requestId)",
            " || (has(oldSelf.spec.",
            $part,
            ") && has(oldSelf.spec.",
            $part,
            ".requestId)",
            " && oldSelf.spec.",
            $part,
            ".requestId == self.spec.",
            $part,
            ".requestId)",
            " || !has(oldSelf.status) || !has(oldSelf.status.commands)",
            " || !oldSelf.status.commands.exists(c, c.id == self.spec.",
            $part,
            ".requestId))",
        )
    };
}

/// The requestId of a part of the spec, in a list: empty when it has none.
macro_rules! id {
    ($part:literal) => {
        concat!("(has(self.", $part, ") && has(self.", $part, ".requestId) ? [self.", $part, ".requestId] : [])")
    };
}

pub(crate) use {fresh, id, recorded};
