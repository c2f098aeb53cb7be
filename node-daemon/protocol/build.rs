//! Compiles the protos without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["kibotos/node/v1/control.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // The bulk of streams is handed on, not copied.
        .bytes(".kibotos.node.v1.StreamFromNode")
        .bytes(".kibotos.node.v1.StreamToNode")
        // These carry secrets: their Debug, written by hand, leaves them out.
        .skip_debug([".kibotos.node.v1.EnrollRequest", ".kibotos.node.v1.EnrollResponse", ".kibotos.node.v1.Hello"])
        .compile_fds(files)?;
    Ok(())
}
