//go:build faults

package broker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestFaultWithoutAMajorityNobodySaysWhatAStreamHas: whichever node remains, its view of the stream
// does not count.
func TestFaultWithoutAMajorityNobodySaysWhatAStreamHas(t *testing.T) {
	for name, leaderLeft := range map[string]bool{"the leader is left": true, "a follower is left": false} {
		t.Run(name, func(t *testing.T) {
			c := testkit.NATSCluster(t, 3)
			cfg := c.Config()
			s := js(t, c.Connect(t))
			stream := declare(t, s, cfg, whole)
			if stream.Replicas != 3 || stream.Leader == "" {
				t.Fatalf("declared %+v", stream)
			}
			if _, err := s.Publish(t.Context(), cfg.Prefix+".0.t1.follow.created", nil); err != nil {
				t.Fatal(err)
			}
			c.AwaitReplicas(t, stream.Name)
			leader, others := c.Leader(t, stream.Name)
			left, gone := leader, others
			if !leaderLeft {
				left, gone = others[0], []*testkit.Broker{leader, others[1]}
			}
			lone := js(t, left.Connect(t)) // only to that node
			cfg.Timeout = time.Second
			for _, b := range gone {
				b.Kill(t)
			}
			// A leader may answer as long as it has recently heard from its followers. After that,
			// no node answers.
			testkit.Eventually(t, "ErrNoLeader", func() (bool, error) {
				got, err := broker.ReadStream(t.Context(), lone, cfg, 0)
				if err == nil && got.Last == 1 {
					return false, nil
				}
				if !errors.Is(err, broker.ErrNoLeader) {
					return false, err
				}
				return true, nil
			})
			for what, ask := range map[string]func() error{
				"the stream":         func() error { _, err := broker.ReadStream(t.Context(), lone, cfg, 0); return err },
				"a stream never met": func() error { _, err := broker.ReadStream(t.Context(), lone, cfg, 7); return err },
				"a message":          func() error { _, err := broker.Next(t.Context(), lone, stream.Name, 1); return err },
				"all streams":        func() error { _, err := broker.Streams(t.Context(), lone, cfg); return err },
				"a declaration": func() error {
					_, err := broker.Declare(t.Context(), lone, cfg, whole,
						testkit.Logger(t))
					return err
				},
			} {
				// The leader of all streams answers as long as it believes to lead, 10 s
				// (broker.ReadStream).
				testkit.Eventually(t, what+" waits for a leader", func() (bool, error) {
					if err := ask(); !errors.Is(err, broker.ErrNoLeader) {
						return false, err
					}
					return true, nil
				})
			}

			gone[0].Restart(t)
			testkit.Eventually(t, "two of three say it again", func() (bool, error) {
				got, err := broker.ReadStream(t.Context(), lone, cfg, 0)
				return err == nil && got.Last == 1, err
			})
			testkit.Eventually(t, "the message is read again", func() (bool, error) {
				m, err := broker.Next(t.Context(), lone, stream.Name, 1)
				if err == nil && (m == nil || m.Seq != 1) {
					t.Fatalf("the new leader reports %+v", m)
				}
				return err == nil, err
			})
		})
	}
}

// TestFaultALeaderThatIsFrozenIsReplaced: the new leader has every acknowledged message.
func TestFaultALeaderThatIsFrozenIsReplaced(t *testing.T) {
	c := testkit.NATSCluster(t, 3)
	cfg := c.Config()
	s := js(t, c.Connect(t))
	stream := declare(t, s, cfg, whole)
	if _, err := s.Publish(t.Context(), cfg.Prefix+".0.t1.follow.created", nil); err != nil {
		t.Fatal(err)
	}
	c.AwaitReplicas(t, stream.Name)
	leader, others := c.Leader(t, stream.Name)
	lone := js(t, others[0].Connect(t))
	cfg.Timeout = time.Second
	leader.Freeze(t)
	testkit.Eventually(t, "another leads", func() (bool, error) {
		got, err := broker.ReadStream(t.Context(), lone, cfg, 0)
		return err == nil && got.Leader != stream.Leader && got.Last == 1, err
	})
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	cfg.Replicas, cfg.MaxAge = 1, time.Hour // a process with another configuration
	declare(t, lone, cfg, whole)
	if got := config(t, lone, stream.Name); got.Replicas != 3 || got.MaxAge != c.Config().MaxAge {
		t.Errorf("the stream was shrunk to %d replicas and %s", got.Replicas, got.MaxAge)
	}
	leader.Thaw(t)
	c.AwaitReplicas(t, stream.Name)

	// Configure does, for the record of erasures too.
	testkit.Eventually(t, "the record, once the cluster has a leader again too", func() (bool, error) {
		err := broker.RecordErased(t.Context(), s, c.Config(), stream.Name, []uint64{1})
		return err == nil, err
	})
	one := 1
	if got, err := broker.Configure(t.Context(), s, c.Config(), broker.Limits{Replicas: &one}); err != nil ||
		len(got) != 1 || got[0].Replicas != 1 {
		t.Errorf("configured %+v, %v", got, err)
	}
	for _, name := range []string{stream.Name, "KV_" + c.Config().Stream + "-erased"} {
		if got := config(t, s, name); got.Replicas != 1 {
			t.Errorf("%s has %d replicas", name, got.Replicas)
		}
	}
}

// TestOneDeclarerWithFewerReplicasTakesNoneAway: a relay was started without NATS_REPLICAS.
func TestOneDeclarerWithFewerReplicasTakesNoneAway(t *testing.T) {
	c := testkit.NATSCluster(t, 3)
	s, cfg := js(t, c.Connect(t)), c.Config()
	for _, replicas := range []int{3, 1} {
		cfg.Replicas = replicas
		name := declare(t, s, cfg, whole).Name
		if got := config(t, s, name).Replicas; got != 3 {
			t.Errorf("declared with %d replicas, the stream has %d, want 3", replicas, got)
		}
	}
}

// TestStreamsGoToServersWithTheirTags: at their creation and when somebody moves them, but not
// because a process has another configuration.
func TestStreamsGoToServersWithTheirTags(t *testing.T) {
	c := testkit.NATSCluster(t, 3) // n0 is in zone:a, the others are in zone:b
	s, cfg := js(t, c.Connect(t)), c.Config()
	cfg.Replicas, cfg.Tags = 1, []string{"zone:a"}
	stream := declare(t, s, cfg, whole)
	if stream.Leader != "n0" || !slices.Equal(stream.Tags, cfg.Tags) {
		t.Errorf("declared for zone:a: %+v", stream)
	}
	if _, err := s.Publish(t.Context(), cfg.Prefix+".0.t1.follow.created", nil); err != nil {
		t.Fatal(err)
	}
	record := func(cfg broker.Config) {
		t.Helper()
		if err := broker.RecordErased(t.Context(), s, cfg, stream.Name, []uint64{7}); err != nil {
			t.Fatal(err)
		}
	}
	record(cfg)
	all := []string{stream.Name, "KV_" + cfg.Stream + "-erased"}
	want := func(when string, servers, tags []string) {
		t.Helper()
		for _, name := range all {
			var got, gotTags []string
			testkit.Eventually(t, fmt.Sprintf("%s: %s on %v with tags %v", when, name, servers, tags), func() (bool, error) {
				stream, err := s.Stream(t.Context(), name)
				if err != nil {
					return false, nil // no leader at the moment
				}
				info := stream.CachedInfo()
				got, gotTags = []string{info.Cluster.Leader}, nil
				for _, r := range info.Cluster.Replicas {
					got = append(got, r.Name)
				}
				slices.Sort(got)
				if info.Config.Placement != nil {
					gotTags = info.Config.Placement.Tags
				}
				ok := slices.Equal(got, servers) || len(servers) == 0 && len(got) == 1 && (got[0] == "n1" || got[0] == "n2")
				if !ok || !slices.Equal(gotTags, tags) {
					err = fmt.Errorf("it is on %v with tags %v", got, gotTags)
				}
				return err == nil, err
			})
		}
	}
	want("declared", []string{"n0"}, cfg.Tags)

	other := cfg
	other.Tags = []string{"zone:b"}
	declare(t, s, other, whole)
	record(other)
	want("declared by a process with other tags", []string{"n0"}, cfg.Tags)
	other.Tags = []string{"zone:nowhere"}
	if _, err := broker.Declare(t.Context(), s, other, broker.Partition{Number: 1, LastSlot: event.Slots - 1},
		testkit.Logger(t)); err == nil || !strings.Contains(err.Error(), "zone:nowhere") {
		t.Errorf("a stream for servers that do not exist: %v", err)
	}

	tags := []string{"Zone:B"} // servers compare tags without regard to case
	if got, err := broker.Configure(t.Context(), s, cfg, broker.Limits{Tags: &tags}); err != nil || len(got) != 1 ||
		!slices.Equal(got[0].Tags, tags) {
		t.Errorf("configured %+v, %v", got, err)
	}
	want("moved", nil, tags) // to a server in zone:b
	other.Tags, other.Replicas = []string{"zone:b"}, 2
	testkit.Eventually(t, "a leader of the stream that is raised", func() (bool, error) {
		_, err := broker.Declare(t.Context(), s, other, whole, testkit.Logger(t))
		return err == nil, err
	})
	testkit.Eventually(t, "a leader of the record that is raised", func() (bool, error) {
		err := broker.RecordErased(t.Context(), s, other, stream.Name, []uint64{7})
		return err == nil, err
	})
	want("raised where it is", []string{"n1", "n2"}, tags)
	if m, err := broker.Next(t.Context(), s, stream.Name, 1); err != nil || m == nil || m.Seq != 1 {
		t.Errorf("the message of the moved stream: %+v, %v", m, err)
	}
	if lost, err := broker.NotErased(t.Context(), s, cfg, stream.Name, []uint64{7}); err != nil || len(lost) > 0 {
		t.Errorf("the record of erasures has lost %v, %v", lost, err)
	}
	tags = nil
	if _, err := broker.Configure(t.Context(), s, cfg, broker.Limits{Tags: &tags}); err != nil {
		t.Error(err)
	}
	want("without tags", []string{"n1", "n2"}, nil)
}

// TestALossIsBelievedOfAMajorityOfTheReplicas reports a loss of a stream on three brokers, and
// counts the leaders that were asked.
func TestALossIsBelievedOfAMajorityOfTheReplicas(t *testing.T) {
	t.Parallel()
	c := testkit.NATSCluster(t, 3)
	s := js(t, c.Connect(t))
	c.AwaitReplicas(t, declare(t, s, c.Config(), whole).Name)
	asked := make(map[string]bool)
	lost, err := broker.ConfirmByQuorum(t.Context(), s, func(ctx context.Context) (broker.Stream, bool, error) {
		stream, err := broker.ReadStream(ctx, s, c.Config(), 0)
		if err == nil {
			asked[stream.Leader] = true
		}
		return stream, true, err
	})
	if err != nil || !lost || len(asked) < 2 {
		t.Errorf("%v after answers of %v: %v", lost, asked, err)
	}
}
