package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// createPlanned creates the streams of a plan in JSON that do not exist, as the nats CLI would.
func createPlanned(t *testing.T, nc *nats.Conn, plan string) {
	t.Helper()
	for line := range strings.Lines(plan) {
		var named struct{ Name string }
		if err := json.Unmarshal([]byte(line), &named); err != nil {
			t.Fatal(err)
		}
		answer, err := nc.Request("$JS.API.STREAM.CREATE."+named.Name, []byte(line), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ Error *jetstream.APIError }
		if err := json.Unmarshal(answer.Data, &got); err != nil || got.Error != nil {
			t.Fatalf("create %s: %v, %v", line, err, got.Error)
		}
	}
}

// TestServeOnStreamsOfOthers runs serve with a login that may create no stream. It waits for the
// streams of the plan, also during a resize.
func TestServeOnStreamsOfOthers(t *testing.T) {
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Unmanaged: true}
	all, err := broker.Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		t.Setenv(p.Variable(), "secret")
	}
	db, server := testkit.Postgres(t), testkit.NATSWith(t, broker.Users(cfg, all))
	token, err := tokens.Create(t.Context(), db.Pool(t, postgres.RoleSystem), 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	owner, err := nats.Connect(server.URL, nats.UserInfo("operator", "secret"), nats.CustomInboxPrefix("_INBOX_operator"),
		nats.Timeout(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close()
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("serve", "secret")
	h := newServe(t, append(serversOf(db, server), "NATS_URL="+u.String(), "NATS_INBOX_PREFIX=_INBOX_serve", "NATS_STREAM=EVENTS",
		"NATS_SUBJECT_PREFIX=events", "NATS_LIVE_PREFIX=live", "NATS_MANAGE=false"))
	u.User = url.UserPassword("operator", "secret")
	vars := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": u.String(), "NATS_INBOX_PREFIX": "_INBOX_operator",
		"NATS_MANAGE": "false"}
	waits := func(stream string) {
		t.Helper()
		testkit.Eventually(t, "the relay to wait for "+stream, func() (bool, error) {
			_, body := get(t, "http://"+h.ops[0]+"/readyz")
			if !strings.Contains(body, `"relay: relay"`) || !strings.Contains(body, "stream "+stream+" does not exist") {
				return false, errors.New(body)
			}
			return true, nil
		})
		if _, stdout, stderr := run(t, vars, "", "doctor"); !strings.Contains(stdout, "stream "+stream+" does not exist") {
			t.Errorf("doctor does not name %s:\n%s%s", stream, stdout, stderr)
		}
	}
	plan := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := run(t, vars, "", append([]string{"stream", "plan", "--for", "json"}, args...)...)
		if code != exitOK {
			t.Fatalf("stream plan: exit code %d\n%s", code, stderr)
		}
		return stdout
	}
	follow := func(followee int, method string) {
		t.Helper()
		testkit.Eventually(t, "the API to answer", func() (bool, error) {
			status, err := h.ask(t, method, fmt.Sprintf("/v1/follows/1/%d", followee), token, nil)
			return status == http.StatusCreated || status == http.StatusOK, err
		})
	}
	counts := func(want string) {
		t.Helper()
		testkit.Eventually(t, "the count "+want, func() (bool, error) {
			var got struct{ Following json.Number }
			status, err := h.ask(t, http.MethodGet, "/v1/users/1/counts", token, &got)
			return status == http.StatusOK && got.Following.String() == want, err
		})
	}
	waits("EVENTS-0")
	follow(2, http.MethodPut)
	createPlanned(t, owner, plan())
	h.ready(t)
	counts("1")

	later := plan("--partitions", "2")
	if code, stdout, stderr := run(t, vars, "", "partitions", "resize", "--to", "2", "--wait", "0", "--yes"); code != exitOK {
		t.Fatalf("resize: exit code %d\n%s%s", code, stdout, stderr)
	}
	waits("EVENTS-1")
	follow(3, http.MethodPut)
	if diff := cmp.Diff(configured(t, later), configured(t, plan())); diff != "" && !strings.Contains(diff, "EVENTS-0") {
		t.Errorf("the plan before and after the resize:\n%s", diff)
	}
	createPlanned(t, owner, plan())
	h.ready(t)
	counts("2")
	if code, _, stderr := run(t, vars, "", "stream", "configure", "--max-age", "48h", "--yes"); code != exitError ||
		!strings.Contains(stderr, "NATS_MANAGE=false") {
		t.Errorf("stream configure: exit code %d\n%s", code, stderr)
	}
}

// configured returns the streams of a plan in JSON, by name.
func configured(t *testing.T, plan string) map[string]jetstream.StreamConfig {
	t.Helper()
	all := map[string]jetstream.StreamConfig{}
	for line := range strings.Lines(plan) {
		var s jetstream.StreamConfig
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		all[s.Name] = s
	}
	return all
}

// The flags of `nats stream add` and `nats kv add` that the plan uses, and the attributes of the
// Terraform provider, as their sources have them.
var (
	natsFlags = strings.Fields(`defaults subjects description storage retention discard discard-per-subject replicas max-age max-bytes
		max-msgs max-msgs-per-subject max-msg-size dupe-window deny-purge no-deny-delete no-allow-rollup allow-direct allow-batch
		republish-source republish-destination metadata tag tags history`)
	terraformNames = strings.Fields(`name description subjects storage retention discard discard_new_per_subject replicas max_age
		max_bytes max_msgs max_msgs_per_subject duplicate_window deny_purge allow_direct allow_atomic republish_source
		republish_destination placement_tags metadata history slots after`)
)

// TestThePlanForEachToolHasTheSettings reads the plan back from each format.
func TestThePlanForEachToolHasTheSettings(t *testing.T) {
	t.Parallel()
	vars := map[string]string{"DATABASE_URL": testkit.Postgres(t).URL, "NATS_REPLICAS": "3", "NATS_PLACEMENT_TAGS": "disk:ssd,zone:a",
		"NATS_MAX_BYTES": "1000000000"}
	plan := func(format string) string {
		t.Helper()
		code, stdout, stderr := run(t, vars, "", "stream", "plan", "--for", format, "--partitions", "2")
		if code != exitOK {
			t.Fatalf("stream plan: exit code %d\n%s", code, stderr)
		}
		return stdout
	}
	want := configured(t, plan("json"))
	if len(want) != 5 || want["EVENTS-1"].Metadata[broker.MetaAfter] != "0" || want["EVENTS-2"].Metadata[broker.MetaSlots] != "16-31" {
		t.Fatalf("the plan: %v", want)
	}

	nack, resources := yaml.NewDecoder(strings.NewReader(plan("nack"))), 0
	for ; ; resources++ {
		var r struct {
			APIVersion string `yaml:"apiVersion"`
			Kind       string
			Metadata   struct{ Name string }
			Spec       nackStream
		}
		if err := nack.Decode(&r); err != nil {
			break
		}
		if r.APIVersion != "jetstream.nats.io/v1beta2" || !regexp.MustCompile(`^[a-z0-9-]+$`).MatchString(r.Metadata.Name) {
			t.Errorf("resource %+v", r)
		}
		if r.Kind != "Stream" {
			continue
		}
		s, w := r.Spec, want[r.Spec.Name]
		age, _ := time.ParseDuration(s.MaxAge)
		window, _ := time.ParseDuration(s.DuplicateWindow)
		got := jetstream.StreamConfig{Name: s.Name, Description: s.Description, Subjects: s.Subjects, Retention: jetstream.LimitsPolicy,
			MaxMsgs: s.MaxMsgs, MaxBytes: s.MaxBytes, MaxMsgsPerSubject: s.MaxMsgsPerSubject, MaxAge: age, Duplicates: window,
			Discard: jetstream.DiscardNew, DiscardNewPerSubject: s.DiscardPerSubject, Storage: jetstream.FileStorage, Replicas: s.Replicas,
			Placement: broker.Placement(s.Placement.Tags), DenyPurge: s.DenyPurge, AllowDirect: s.AllowDirect,
			AllowAtomicPublish: s.AllowAtomicPublish, Metadata: s.Metadata}
		if s.RePublish != nil {
			got.RePublish = &jetstream.RePublish{Source: s.RePublish.Source, Destination: s.RePublish.Destination}
		}
		w.MaxMsgs = unlimited(w.MaxMsgs)
		if diff := cmp.Diff(w, got); diff != "" {
			t.Errorf("%s for NACK (-want +got):\n%s", s.Name, diff)
		}
	}
	if resources != 5 {
		t.Errorf("%d resources for NACK", resources)
	}

	commands := plan("nats")
	for _, flag := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(commands, -1) {
		if !slices.Contains(natsFlags, flag[1]) {
			t.Errorf("the nats CLI has no --%s", flag[1])
		}
	}
	terraform := plan("terraform")
	for _, name := range regexp.MustCompile(`(?m)^ +(\w+) = `).FindAllStringSubmatch(terraform, -1) {
		if !slices.Contains(terraformNames, name[1]) {
			t.Errorf("the Terraform provider has no %s", name[1])
		}
	}
	for _, text := range []string{commands, terraform} {
		for name, s := range want {
			if name = strings.TrimPrefix(name, "KV_"); !strings.Contains(text, name) {
				t.Errorf("%s is missing in\n%s", name, text)
			}
			if s.RePublish != nil && (!strings.Contains(text, s.RePublish.Source) || !strings.Contains(text, s.RePublish.Destination) ||
				!strings.Contains(text, s.Subjects[0]) || !strings.Contains(text, s.Metadata[broker.MetaSlots])) {
				t.Errorf("a setting of %s is missing in\n%s", name, text)
			}
		}
	}
	if code, _, stderr := run(t, vars, "", "stream", "plan", "--for", "ansible"); code != exitInput ||
		!strings.Contains(stderr, "ansible") {
		t.Errorf("an unknown format: exit code %d, %s", code, stderr)
	}
}
