//! A second virtio-serial port of a bare guest: what the channel can do when nothing frames, checks or forwards anything.

use std::{os::fd::OwnedFd, time::Instant};

use anyhow::{Result, bail};
use command_fds::FdMapping;
use kibo_guest_protocol::{HostEvent, ProcessEnd, v1::Process};
use kibo_node_daemon::vmm::{Qemu, SocketDir};
use tokio::{io::AsyncWriteExt as _, net::UnixStream};

use super::streams::{CHUNK, FILE, MIB, count, make_file, mib_per_second, random};
use crate::{
    bare::{self, Bare, Guest},
    site::Site,
};

const RAW_SOCKET: &str = "raw.sock";
const RAW_PORT: &str = "raw.0";

/// The port; nobody in the guest has it open.
pub(super) struct Port {
    guest: Guest,
    stream: UnixStream,
}

impl Port {
    pub async fn open(site: &Site) -> Result<Self> {
        let guest = Bare::new(site)?.boot(true, add_port).await?;
        let stream = guest.sockets.connect(RAW_SOCKET).await?;
        let mut port = Self { guest, stream };
        port.run(&make_file()).await?;
        Ok(port)
    }

    pub async fn read_rate(&mut self) -> Result<f64> {
        let Self { guest, stream } = self;
        let command = with_port(&format!("dd if={FILE} of=/dev/$port bs=64k 2>/dev/null"));
        let (ran, counted) = tokio::join!(run(guest, &command), count(stream, MIB << 20));
        ran?;
        let (bytes, seconds) = counted?;
        Ok(mib_per_second(bytes, seconds))
    }

    pub async fn write_rate(&mut self) -> Result<f64> {
        self.write_rate_to(&format!("head -c {} /dev/$port >/dev/null", MIB << 20)).await
    }

    pub async fn write_rate_into_file(&mut self) -> Result<f64> {
        let blocks = (MIB << 20) / CHUNK;
        self.write_rate_to(&format!(
            "dd if=/dev/$port of=/data/copy bs={CHUNK} iflag=fullblock count={blocks} 2>/dev/null"
        ))
        .await
    }

    async fn write_rate_to(&mut self, command: &str) -> Result<f64> {
        let Self { guest, stream } = self;
        let command = with_port(command);
        let begun = Instant::now();
        let feed = async {
            let data = random(CHUNK);
            for _ in 0..(MIB << 20) / CHUNK {
                stream.write_all(&data).await?;
            }
            anyhow::Ok(())
        };
        let (ran, fed) = tokio::join!(run(guest, &command), feed);
        ran?;
        fed?;
        Ok(mib_per_second(MIB << 20, begun.elapsed().as_secs_f64()))
    }

    async fn run(&mut self, command: &str) -> Result<()> {
        run(&mut self.guest, command).await
    }
}

/// A shell line in which `$port` is the port's device.
fn with_port(command: &str) -> String {
    format!("port=$(basename $(dirname $(grep -lx {RAW_PORT} /sys/class/virtio-ports/*/name))); {command}")
}

/// Runs a shell line in a bare guest.
async fn run(guest: &mut Guest, line: &str) -> Result<()> {
    let argv = ["/bin/sh", "-c", line].map(str::to_owned).to_vec();
    let path =
        kibo_guest_protocol::v1::EnvVar { name: "PATH".to_owned(), value: "/usr/sbin:/usr/bin:/sbin:/bin".to_owned() };
    guest.connection.exec(Process { argv, env: vec![path], ..Process::default() }, false)?;
    let mut said = Vec::new();
    loop {
        match bare::next(&mut guest.connection, &mut guest.stream).await? {
            HostEvent::ExecEnded { end: ProcessEnd::Code(0), .. } => return Ok(()),
            HostEvent::ExecEnded { end, .. } => bail!("{line}: {end:?}: {}", String::from_utf8_lossy(&said)),
            HostEvent::Output { data, .. } => said.extend_from_slice(&data),
            _ => {}
        }
    }
}

/// A port beside the agent's.
fn add_port(qemu: &mut Qemu, sockets: &SocketDir) -> Result<()> {
    let child_fd = qemu.files.iter().map(|file| file.child_fd).max().unwrap_or(2) + 1;
    let parent_fd = OwnedFd::from(sockets.listen(RAW_SOCKET)?);
    qemu.files.push(FdMapping { parent_fd, child_fd });
    let arguments = [
        "-chardev".to_owned(),
        format!("socket,id=raw,fd={child_fd},server=on,wait=off"),
        "-device".to_owned(),
        format!("virtserialport,chardev=raw,name={RAW_PORT},id=raw-port"),
    ];
    qemu.arguments.extend(arguments.map(Into::into));
    Ok(())
}
