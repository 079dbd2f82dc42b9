package deploy_test

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

func TestBrokerOfTheFleetSyncsBeforeItAcknowledges(t *testing.T) {
	opts, err := server.ProcessConfigFile("nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	if !opts.JetStream || !opts.SyncAlways || opts.JetStreamMaxStore <= 0 || opts.StoreDir != "/data" {
		t.Errorf("JetStream %v, sync always %v, at most %d bytes in %q", opts.JetStream, opts.SyncAlways, opts.JetStreamMaxStore, opts.StoreDir)
	}
}
