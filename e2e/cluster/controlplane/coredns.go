package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

// Only the plugins that the cluster's Corefile uses are linked in. Their order here is the order in which a query
// passes them: `template` comes before `kubernetes`, so a catch-all template needs a server block of its own.
func init() {
	dnsserver.Directives = []string{"bind", "ready", "health", "errors", "log", "cache", "template", "kubernetes"}
}

func runCoreDNS() { coremain.Run() }
