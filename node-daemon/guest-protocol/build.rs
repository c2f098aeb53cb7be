//! Compiles the protos with protox, so that nobody needs a protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["kibotos/guest/v1/guest.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    let mut config = prost_build::Config::new();
    config.compile_fds(files)?;
    Ok(())
}
