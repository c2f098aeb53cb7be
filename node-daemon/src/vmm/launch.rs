//! `kibo-node-daemon vm-launch`: what the daemon starts in order to become QEMU.
//!
//! A step of its own, since leaving namespaces and the user behind between fork and exec would be code that may neither
//! allocate nor fail well. It joins the Instance's cgroup, leaves the daemon's session and namespaces, drops root for
//! good and executes QEMU in its place (the pid stays). Nothing ties it to the daemon: the VM outlives it.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{self, Command},
};

use rustix::{
    mount::{MountPropagationFlags, mount_change},
    process::{Gid, Resource, Rlimit, Uid, setrlimit, setsid},
    thread::{
        UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe,
    },
};

const OOM_SCORE: &str = "/proc/self/oom_score_adj";
const OOM_SCORE_OF_VM: i32 = 500;

/// Internal: becomes the QEMU process of an Instance.
#[derive(Debug, clap::Args)]
pub struct LaunchArgs {
    /// Name of the process, as QEMU's -name.
    #[arg(long)]
    pub name: String,
    /// Files to write the own pid into.
    #[arg(long = "join")]
    pub joins: Vec<PathBuf>,
    #[arg(long)]
    pub uid: u32,
    #[arg(long)]
    pub gid: u32,
    /// Further groups, for devices that QEMU has to open itself.
    #[arg(long = "group")]
    pub groups: Vec<u32>,
    /// QEMU and its arguments.
    #[arg(last = true, required = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, thiserror::Error)]
#[error("failed to {step}: {source}")]
pub struct LaunchError {
    step: String,
    source: io::Error,
}

/// Returns only when something failed. The process must have one thread: the user is changed for that one only.
pub fn launch(args: &LaunchArgs) -> Result<std::convert::Infallible, LaunchError> {
    let pid = process::id().to_string();
    for file in &args.joins {
        fs::write(file, &pid).map_err(|source| LaunchError { step: format!("join {}", file.display()), source })?;
    }
    // A process group leader cannot make a session; the daemon's fork is none.
    setsid().map_err(step("leave the session of the daemon"))?;
    leave_namespaces().map_err(step("enter empty namespaces"))?;
    // Nothing was mounted: unmounts of the host must still arrive here, or this VM would keep every file system busy.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(step("detach the mounts from the host's"))?;
    leave_habits().map_err(|source| LaunchError { step: "leave the daemon's habits".to_owned(), source })?;
    drop_root(args).map_err(step("become the unprivileged user"))?;
    let [program, arguments @ ..] = args.command.as_slice() else { unreachable!("clap requires a command") };
    let source = Command::new(program).args(arguments).exec();
    Err(LaunchError { step: format!("execute {}", program.display()), source })
}

#[expect(unsafe_code, reason = "unshare is unsafe because of CLONE_FILES, which is not among the flags")]
fn leave_namespaces() -> rustix::io::Result<()> {
    let flags = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWNS | UnshareFlags::NEWUTS;
    // SAFETY: no descriptor table is unshared, so no descriptor can dangle.
    unsafe { unshare_unsafe(flags) }
}

/// What the daemon was given for itself and a VM must not have.
fn leave_habits() -> io::Result<()> {
    std::env::set_current_dir("/")?;
    // A core would be the guest's memory on the host's disk.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    // When the host has no memory left, a VM goes before the daemon and the system. Lowering it would need a right that
    // the daemon may lack, and is not wanted either.
    let current: i32 = fs::read_to_string(OOM_SCORE)?.trim().parse().map_err(io::Error::other)?;
    if current < OOM_SCORE_OF_VM { fs::write(OOM_SCORE, OOM_SCORE_OF_VM.to_string()) } else { Ok(()) }
}

fn drop_root(args: &LaunchArgs) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(args.uid), Gid::from_raw(args.gid));
    let groups: Vec<Gid> = args.groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    // Clears all capabilities as well.
    set_thread_res_uid(uid, uid, uid)?;
    set_no_new_privs(true)
}

fn step(step: &'static str) -> impl FnOnce(rustix::io::Errno) -> LaunchError {
    move |errno| LaunchError { step: step.to_owned(), source: errno.into() }
}
