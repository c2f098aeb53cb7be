use super::*;

fn volume(serial: &str, mount_path: &str) -> v1::Volume {
    v1::Volume { serial: serial.to_owned(), mount_path: mount_path.to_owned(), ..v1::Volume::default() }
}

fn message() -> v1::Configure {
    v1::Configure {
        instance_id: "inst-1".to_owned(),
        time_unix_nanos: 1,
        entropy: vec![1; ENTROPY_LEN],
        hostname: "demo".to_owned(),
        network: Some(v1::Network {
            mac: "52:54:00:12:34:56".to_owned(),
            address: "10.77.3.2".to_owned(),
            prefix_length: 30,
            gateway: "10.77.3.1".to_owned(),
            ..v1::Network::default()
        }),
        root_image: Some(v1::RootImage { serial: "root".to_owned(), fs_type: "erofs".to_owned() }),
        writable_layer: Some(v1::WritableLayer { serial: "rw".to_owned() }),
        volumes: vec![volume("vol0", "/data/deep/"), volume("vol1", "/data")],
        entrypoint: Some(v1::Entrypoint {
            process: Some(v1::Process { argv: vec!["sleep".to_owned()], ..v1::Process::default() }),
            restart_policy: RestartPolicy::Always.into(),
            ..v1::Entrypoint::default()
        }),
    }
}

#[test]
fn a_full_message_is_taken() {
    let request = Request::parse(message()).expect("all is right");
    assert_eq!(request.root_image.fs_type, RootFs::Erofs);
    let paths: Vec<_> = request.volumes.iter().map(|volume| volume.mount_path.to_str()).collect();
    assert_eq!(paths, [Some("/data"), Some("/data/deep")], "outer volumes come first");
    let network = request.network.expect("given");
    assert_eq!(network.mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    let entrypoint = request.entrypoint.expect("given");
    assert_eq!((entrypoint.backoff_initial, entrypoint.backoff_maximum), DEFAULT_BACKOFF);
}

#[test]
fn every_senseless_field_is_refused_with_its_stage() {
    type Spoil = fn(&mut v1::Configure);
    let cases: [(ConfigureStage, Spoil); 14] = [
        (ConfigureStage::Request, |message| {
            message.instance_id.clear();
        }),
        (ConfigureStage::Clock, |message| message.time_unix_nanos = 0),
        (ConfigureStage::Entropy, |message| {
            message.entropy.truncate(5);
        }),
        (ConfigureStage::Hostname, |message| {
            message.hostname = "a b".to_owned();
        }),
        (ConfigureStage::RootImage, |message| {
            message.root_image = None;
        }),
        (ConfigureStage::RootImage, |message| {
            message.root_image.as_mut().unwrap().fs_type = "ntfs".to_owned();
        }),
        (ConfigureStage::WritableLayer, |message| {
            message.writable_layer = None;
        }),
        (ConfigureStage::Volume, |message| {
            message.volumes.push(volume("vol2", "data"));
        }),
        (ConfigureStage::Volume, |message| {
            message.volumes.push(volume("vol2", "/"));
        }),
        (ConfigureStage::Volume, |message| {
            message.volumes.push(volume("vol2", "/proc/x"));
        }),
        (ConfigureStage::Volume, |message| {
            message.volumes.push(volume("vol2", "/srv/../proc"));
        }),
        (ConfigureStage::Volume, |message| {
            message.volumes.push(volume("vol2", "/data"));
        }),
        (ConfigureStage::Network, |message| {
            message.network.as_mut().unwrap().gateway = "fe80::1".to_owned();
        }),
        (ConfigureStage::Entrypoint, |message| {
            message.entrypoint.as_mut().unwrap().process = None;
        }),
    ];
    for (index, (stage, spoil)) in cases.into_iter().enumerate() {
        let mut message = message();
        spoil(&mut message);
        let refused = Request::parse(message).err().map(|failure| failure.stage());
        assert_eq!(refused, Some(stage), "case {index}");
    }
}
