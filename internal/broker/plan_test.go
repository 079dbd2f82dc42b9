package broker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAWrongStreamOfOthersIsNamed changes one setting of the plan at a time.
func TestAWrongStreamOfOthersIsNamed(t *testing.T) {
	b := testkit.NATS(t)
	cfg := b.Config()
	cfg.Unmanaged = true
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	p := broker.Partition{LastSlot: 31}
	if _, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t)); !errors.Is(err, broker.ErrMissing) ||
		!strings.Contains(err.Error(), cfg.StreamName(0)) {
		t.Errorf("without a stream: %v", err)
	}
	for says, change := range map[string]func(*jetstream.StreamConfig){
		"":                                 func(*jetstream.StreamConfig) {},
		"its subjects are":                 func(s *jetstream.StreamConfig) { s.Subjects = []string{cfg.Prefix + ".>"} },
		"its storage is":                   func(s *jetstream.StreamConfig) { s.Storage = jetstream.MemoryStorage },
		"its retention is":                 func(s *jetstream.StreamConfig) { s.Retention = jetstream.InterestPolicy },
		"deny_purge":                       func(s *jetstream.StreamConfig) { s.DenyPurge = false },
		"denies deletes":                   func(s *jetstream.StreamConfig) { s.DenyDelete = true },
		"does not republish " + cfg.Prefix: func(s *jetstream.StreamConfig) { s.RePublish = nil },
		"to " + cfg.LivePrefix: func(s *jetstream.StreamConfig) {
			s.RePublish.Destination = strings.Replace(s.RePublish.Destination, cfg.LivePrefix, "elsewhere", 1)
		},
		"atomic batches":          func(s *jetstream.StreamConfig) { s.AllowAtomicPublish = false },
		"drops old events":        func(s *jetstream.StreamConfig) { s.Discard = jetstream.DiscardOld },
		"limits the number":       func(s *jetstream.StreamConfig) { s.MaxMsgs = 1000 },
		"rollups":                 func(s *jetstream.StreamConfig) { s.DenyPurge, s.AllowRollup = false, true },
		"acknowledges no":         func(s *jetstream.StreamConfig) { s.AllowAtomicPublish, s.NoAck = false, true },
		"direct gets":             func(s *jetstream.StreamConfig) { s.AllowDirect = false },
		"its metadata says slots": func(s *jetstream.StreamConfig) { s.Metadata = nil },
	} {
		t.Run(says, func(t *testing.T) {
			s := broker.NewPlan(cfg, []broker.Partition{p}, nil, nil).Streams[0].StreamConfig
			change(&s)
			if _, err := js.CreateStream(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := js.DeleteStream(t.Context(), s.Name); err != nil {
					t.Error(err)
				}
			}()
			_, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t))
			if says == "" && err != nil || says != "" && (!errors.Is(err, broker.ErrStreamShape) || !strings.Contains(err.Error(), says)) {
				t.Errorf("got %v", err)
			}
			refused, reset, err := broker.Inspect(t.Context(), js, cfg, p)
			if err != nil || reset || says == "" && len(refused) > 0 || !strings.Contains(strings.Join(refused, "; "), says) {
				t.Errorf("inspected: %q, %t, %v", refused, reset, err)
			}
			now, err := js.Stream(t.Context(), s.Name)
			if err != nil {
				t.Fatal(err)
			}
			if got := now.CachedInfo().Config.DenyPurge; got != s.DenyPurge {
				t.Errorf("the check has changed the stream")
			}
		})
	}
}

// TestThePlanIsWhatTheProgramsCreate compares each stream of the plan with the one that the
// programs create, and expects that NATS_MANAGE=false creates nothing.
func TestThePlanIsWhatTheProgramsCreate(t *testing.T) {
	b := testkit.NATS(t)
	cfg := b.Config()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	p := broker.Partition{LastSlot: 31}
	person := broker.ErasedPerson{TenantID: 1, PersonID: "7"}
	others := cfg
	others.Unmanaged = true
	if err := broker.RecordErasure(t.Context(), js, others, person); !errors.Is(err, broker.ErrMissing) {
		t.Errorf("without a bucket: %v", err)
	}
	if err := broker.DeclareDead(t.Context(), js, others, broker.Stream{}); !errors.Is(err, broker.ErrMissing) {
		t.Errorf("without the dead letters: %v", err)
	}
	if err := broker.HasErasedBucket(t.Context(), js, others); !errors.Is(err, broker.ErrMissing) {
		t.Errorf("without a bucket: %v", err)
	}
	s, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t))
	if err == nil {
		err = broker.DeclareDead(t.Context(), js, cfg, s)
	}
	if err == nil {
		err = broker.RecordErasure(t.Context(), js, cfg, person)
	}
	if err != nil {
		t.Fatal(err)
	}
	plan := broker.NewPlan(cfg, []broker.Partition{p}, nil, nil)
	for _, want := range []jetstream.StreamConfig{plan.Streams[0].StreamConfig, plan.Dead, plan.BucketStream()} {
		made, err := js.Stream(t.Context(), want.Name)
		if err != nil {
			t.Fatal(err)
		}
		other := want // what the server makes of the plan
		other.Name, other.Subjects, other.RePublish = "OTHER", []string{"other"}, nil
		planned, err := js.CreateStream(t.Context(), other)
		if err != nil {
			t.Fatal(err)
		}
		other = planned.CachedInfo().Config
		other.Name, other.Subjects, other.RePublish = want.Name, want.Subjects, want.RePublish
		if diff := cmp.Diff(made.CachedInfo().Config, other, cmpopts.IgnoreFields(jetstream.StreamConfig{}, "Metadata")); diff != "" {
			t.Errorf("%s, as created and as planned:\n%s", want.Name, diff)
		}
		if err := js.DeleteStream(t.Context(), "OTHER"); err != nil {
			t.Fatal(err)
		}
	}
	// The plan has no consumers of subscribers.
	subscriber := broker.Principal{Role: broker.Subscriber, Name: "billing", Durable: true}
	if _, err := broker.Subscribe(t.Context(), js, cfg, subscriber, broker.Subscription{AckWait: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), broker.NewPlan(cfg, []broker.Partition{{Number: 1, LastSlot: 31, After: []int{0}}},
		nil, nil).Streams[0].StreamConfig); err != nil {
		t.Fatal(err)
	}
	_, err = broker.Declare(t.Context(), js, others, broker.Partition{Number: 1, LastSlot: 31, After: []int{0}}, testkit.Logger(t))
	if !errors.Is(err, broker.ErrMissing) || !strings.Contains(err.Error(), "consumer billing of stream "+cfg.StreamName(1)) ||
		strings.Contains(err.Error(), "stream plan") || strings.Contains(err.Error(), "create consumer") {
		t.Errorf("without a subscriber's consumer: %v", err)
	}
	if _, err := broker.Configure(t.Context(), js, others, broker.Limits{}); !errors.Is(err, broker.ErrUnmanaged) {
		t.Errorf("configure: %v", err)
	}
}
