//! Where the programs are that a local cluster runs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    #[error("failed to find out where this program is")]
    OwnPath(#[source] std::io::Error),
    #[error("failed to run {}", script.display())]
    Run {
        script: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} failed: what it printed is above", script.display())]
    Build { script: PathBuf },
}

/// Directories of programs and images.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Holds `bin/` with etcd, kube-apiserver, kube-controller-manager and kubectl.
    pub control_plane: PathBuf,
    /// Holds the guest's kernel, initramfs and root images; none where no node is wanted.
    pub guest: Option<PathBuf>,
    /// Holds kibo-operator, kibo-node-daemon and kibo.
    pub own: PathBuf,
    /// The repository: charts and examples.
    pub repository: PathBuf,
}

/// Which parts must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Directories that an earlier command has built, or none: for stopping and looking.
    Nothing,
    ControlPlane,
    /// The operator without nodes, so no guest.
    Operator,
    Everything,
}

impl Programs {
    /// Finds the programs: in the directories that `KIBOTOS_CONTROL_PLANE` and `KIBOTOS_GUEST` name,
    /// else by the build scripts, which are quick when nothing has changed.
    pub fn find(need: Need) -> Result<Self, ProgramsError> {
        let repository = repository();
        let control_plane = match need {
            Need::Nothing => PathBuf::new(),
            Need::ControlPlane | Need::Operator | Need::Everything => {
                built("KIBOTOS_CONTROL_PLANE", &repository.join("hack/control-plane/build"))?
            }
        };
        let guest = match need {
            Need::Everything => Some(built("KIBOTOS_GUEST", &repository.join("hack/guest/build"))?),
            Need::Nothing | Need::ControlPlane | Need::Operator => None,
        };
        Ok(Self { control_plane, guest, own: own_directory()?, repository })
    }

    pub fn kubectl(&self) -> PathBuf {
        self.control_plane.join("bin/kubectl")
    }

    /// No part of a local cluster, and built where it is asked for: by `KIBOTOS_KUBE_SCHEDULER`, else by its script.
    pub fn kube_scheduler(&self) -> Result<PathBuf, ProgramsError> {
        built("KIBOTOS_KUBE_SCHEDULER", &self.repository.join("hack/control-plane/scheduler"))
    }

    pub fn kibo(&self) -> PathBuf {
        self.own.join("kibo")
    }

    pub fn operator(&self) -> PathBuf {
        self.own.join("kibo-operator")
    }

    pub fn node_daemon(&self) -> PathBuf {
        self.own.join("kibo-node-daemon")
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is a directory of the repository").to_owned()
}

/// The target directory of this build: where cargo puts every program of the workspace.
fn own_directory() -> Result<PathBuf, ProgramsError> {
    let exe = env::current_exe().map_err(ProgramsError::OwnPath)?;
    let dir = exe.parent().unwrap_or(Path::new("/"));
    // Tests run from deps/, one below.
    Ok(if dir.ends_with("deps") { dir.parent().unwrap_or(dir).to_owned() } else { dir.to_owned() })
}

fn built(variable: &str, script: &Path) -> Result<PathBuf, ProgramsError> {
    if let Some(dir) = env::var_os(variable) {
        return Ok(dir.into());
    }
    let failed = || ProgramsError::Build { script: script.to_owned() };
    let output = Command::new(script)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| ProgramsError::Run { script: script.to_owned(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().filter(|_| output.status.success());
    last.map(PathBuf::from).ok_or_else(failed)
}
