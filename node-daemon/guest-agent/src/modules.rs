//! Kernel modules, in the order that the initramfs lists them: `/modules/order`, one `<moment> <file>` a line.

use std::fs::{self, File};
use std::io;
use std::path::Path;

const DIRECTORY: &str = "/modules";

/// When a module is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Boot,
    /// Not before the guest is configured: a guest that was saved before it shall find the disks of its restored self.
    Configure,
}

impl Moment {
    const fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Configure => "configure",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read the list of kernel modules: {0}")]
    List(io::Error),
    #[error("failed to load the kernel module {file}: {source}")]
    Load { file: String, source: io::Error },
}

pub fn load(moment: Moment) -> Result<(), Error> {
    let list = fs::read_to_string(Path::new(DIRECTORY).join("order")).map_err(Error::List)?;
    for file in at(&list, moment) {
        load_file(file).map_err(|source| Error::Load { file: file.to_owned(), source })?;
    }
    Ok(())
}

fn at(list: &str, moment: Moment) -> impl Iterator<Item = &str> {
    list.lines()
        .filter_map(|line| line.split_once(' '))
        .filter(move |(name, _)| *name == moment.name())
        .map(|(_, file)| file.trim())
}

fn load_file(file: &str) -> io::Result<()> {
    let module = File::open(Path::new(DIRECTORY).join(file))?;
    match rustix::system::finit_module(&module, c"", 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_moment_has_its_modules_in_order() {
        let list = "boot b.ko\nconfigure disk.ko\nboot a.ko\n";
        assert_eq!(at(list, Moment::Boot).collect::<Vec<_>>(), ["b.ko", "a.ko"]);
        assert_eq!(at(list, Moment::Configure).collect::<Vec<_>>(), ["disk.ko"]);
    }
}
