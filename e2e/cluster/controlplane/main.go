// Command controlplane is one binary with every Kubernetes process that a one-machine cluster needs.
//
// The name it is called by decides what it is, as with busybox: a symlink `kubelet -> controlplane` is the kubelet.
// One binary links in minutes rather than the better part of an hour for eight, and shares its pages between processes.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubectl: credential plugins named in a kubeconfig
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics on every /metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // kubernetes_build_info
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// components maps the name that the binary is called by to what it then runs.
var components = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"coredns":                 runCoreDNS,
	"kube-apiserver":          command(apiserver.NewAPIServerCommand),
	"kube-controller-manager": command(controllermanager.NewControllerManagerCommand),
	"kube-scheduler":          command(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kube-proxy":              command(proxy.NewProxyCommand),
	"kubelet":                 command(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kubectl":                 command(kubectl.NewDefaultKubectlCommand),
}

// command builds the component's flags only when it is chosen: they register in process-wide sets and would clash.
func command(build func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(build())) }
}

func main() {
	name := filepath.Base(os.Args[0])
	if _, known := components[name]; !known && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	run, known := components[name]
	if !known {
		names := make([]string, 0, len(components))
		for n := range components {
			names = append(names, n)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "usage: controlplane COMPONENT [FLAGS], or a symlink named like the component\ncomponents: %s\n",
			strings.Join(names, " "))
		os.Exit(2)
	}
	run()
}
