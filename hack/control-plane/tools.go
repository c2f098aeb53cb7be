//go:build tools

// Package controlplane pins the programs of the Kubernetes control plane that the tests and the
// local cluster run. Nothing imports it; it exists so that `go mod tidy` keeps their modules.
package controlplane

import (
	_ "go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
