package broker_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/testkit"
)

// BenchmarkPublishOnThreeBrokers publishes single messages and atomic batches to a stream with
// three replicas. The servers sync before each ack or every two minutes. All three share this
// machine's disk.
func BenchmarkPublishOnThreeBrokers(b *testing.B) {
	for _, sync := range []string{"always", "2m"} {
		b.Run("sync="+sync, func(b *testing.B) {
			js, cfg := threeServers(b, sync == "2m")
			for _, n := range []int{1, 100, 1000} {
				b.Run("messages="+strconv.Itoa(n), func(b *testing.B) {
					for b.Loop() {
						publishBatch(b, js.Conn(), cfg, n)
					}
					b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
				})
			}
		})
	}
}

// publishBatch publishes n messages at once, and waits for their ack.
func publishBatch(b *testing.B, nc *nats.Conn, cfg broker.Config, n int) {
	id := nats.NewInbox()[7:]
	for i := 1; i <= n; i++ {
		m := &nats.Msg{Subject: cfg.Prefix + ".0.t1.follow.created", Header: nats.Header{}, Data: make([]byte, 200)}
		if n > 1 {
			m.Header.Set("Nats-Batch-Id", id)
			m.Header.Set("Nats-Batch-Sequence", strconv.Itoa(i))
		}
		if i < n {
			if err := nc.PublishMsg(m); err != nil {
				b.Fatal(err)
			}
			continue
		}
		if n > 1 {
			m.Header.Set("Nats-Batch-Commit", "1")
		}
		if ack, err := nc.RequestMsg(m, 30*time.Second); err != nil || len(ack.Data) == 0 || ack.Data[2] != 's' {
			b.Fatalf("publish %d messages: %v, %+v", n, err, ack)
		}
	}
}

// threeServers runs a cluster in this process, with a stream on each of its servers.
func threeServers(b *testing.B, lazy bool) (jetstream.JetStream, broker.Config) {
	b.Helper()
	var ports []int
	for range 3 {
		port, err := pglocal.FreePort()
		if err != nil {
			b.Fatal(err)
		}
		ports = append(ports, port)
	}
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 3, MaxBytes: -1,
		Timeout: 5 * time.Second, Ping: 2 * time.Second}
	for i, port := range ports {
		member := &natsserver.Cluster{Server: fmt.Sprintf("n%d", i), Port: port}
		for _, other := range ports[:i] {
			member.Routes = append(member.Routes, fmt.Sprintf("nats://127.0.0.1:%d", other))
		}
		server, err := natsserver.Start(natsserver.Config{Dir: b.TempDir(), MaxStore: 4 << 30, LazySync: lazy, Cluster: member})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(server.Shutdown)
		cfg.URL = server.URL()
	}
	nc, err := broker.Connect(cfg, "bench", testkit.Logger(b))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	s, err := jetstream.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	testkit.Eventually(b, "a stream with three replicas", func() (bool, error) {
		_, err := broker.Declare(b.Context(), s, cfg, whole, testkit.Logger(b))
		return err == nil, err
	})
	return s, cfg
}
