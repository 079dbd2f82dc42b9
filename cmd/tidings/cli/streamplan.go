package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// planFormats write a plan for the tool of each name.
var planFormats = map[string]func(io.Writer, broker.Plan) error{"nats": planNATS, "nack": planNACK, "terraform": planTerraform,
	"json": planJSON}

func (p Process) streamPlanCommand() *cobra.Command {
	var format string
	var partitions int
	c := p.command(command{
		use:   "plan",
		short: "Print the streams and the bucket that NATS must have, for the tool that creates them",
		long: `Plan prints everything that Tidings needs in JetStream: the stream of each partition, with those that
a resize has requested, the bucket that records erasures, and the stream of subscribers' dead
letters. The settings are those with which a relay creates streams, from the same environment
(NATS_STREAM, NATS_SUBJECT_PREFIX, NATS_LIVE_PREFIX, NATS_REPLICAS, NATS_PLACEMENT_TAGS,
NATS_MAX_AGE, NATS_MAX_BYTES). The command connects to the database, not to NATS.

Use it with NATS_MANAGE=false: then no process creates or changes a stream. --partitions N adds the
streams of a later tidings partitions resize --to N. Create them before the resize, because the
relays wait for them.

Formats:
- nats: commands of the nats CLI.
- json: one configuration per line, as nats stream add NAME --config FILE takes it.
- nack: Stream and KeyValue resources for the JetStream controller of Kubernetes.
- terraform: resources of the provider nats-io/jetstream.

nack and terraform also list the streams of closed partitions, so that they do not delete them.
Remove these once every consumer and subscriber has read them.`,
		name: "stream", needs: needTruth,
		check: func(*session, []string) error {
			if planFormats[format] == nil {
				return &usageError{fmt.Errorf("--for is %q: want nats, nack, terraform or json", format)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			all, err := outbox.Partitions(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			if partitions > 0 {
				added, err := outbox.Planned(all, partitions)
				if err != nil {
					return nil, fmt.Errorf("plan %d partitions: %w", partitions, err)
				}
				all = append(all, added...)
			}
			return nil, planFormats[format](s.Stdout, planOf(s.Broker, all))
		},
	})
	c.Flags().StringVar(&format, "for", "nats", "the tool: nats, nack, terraform or json")
	c.Flags().IntVar(&partitions, "partitions", 0, "add the streams of a resize to this number of partitions")
	return c
}

func planOf(cfg broker.Config, all []outbox.Partition) broker.Plan {
	var partitions []broker.Partition
	closed, repaired := map[int]bool{}, map[int]bool{}
	for _, p := range all {
		partitions = append(partitions, broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot, After: p.After})
		closed[p.Number] = p.Closed
		if p.Replaced() {
			for _, next := range outbox.Successors(all, p.Number) {
				repaired[next.Number] = true
			}
		}
	}
	return broker.NewPlan(cfg, partitions, closed, repaired)
}

// open returns the streams that a tool creates once.
func open(plan broker.Plan) (all []jetstream.StreamConfig) {
	for _, s := range plan.Streams {
		if !s.Closed {
			all = append(all, s.StreamConfig)
		}
	}
	return append(all, plan.Dead)
}

func planJSON(w io.Writer, plan broker.Plan) error {
	for _, s := range append(open(plan), plan.BucketStream()) {
		if err := json.NewEncoder(w).Encode(s); err != nil {
			return fmt.Errorf("write the plan: %w", err)
		}
	}
	return nil
}

// quote returns text as one word of a shell.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

func planNATS(w io.Writer, plan broker.Plan) error {
	var b strings.Builder
	for _, s := range open(plan) {
		age := "-1"
		if s.MaxAge > 0 {
			age = s.MaxAge.String()
		}
		fmt.Fprintf(&b, "nats stream add %s --defaults --subjects=%s \\\n", s.Name, quote(strings.Join(s.Subjects, ",")))
		fmt.Fprintf(&b, "  --description=%s --storage=file --retention=limits --discard=new --replicas=%d \\\n",
			quote(s.Description), s.Replicas)
		fmt.Fprintf(&b, "  --max-age=%s --max-bytes=%d --max-msgs=%d --max-msgs-per-subject=%d --max-msg-size=-1", age,
			unlimited(s.MaxBytes), unlimited(s.MaxMsgs), unlimited(s.MaxMsgsPerSubject))
		if s.Duplicates > 0 {
			fmt.Fprintf(&b, " --dupe-window=%s", s.Duplicates)
		}
		if s.DiscardNewPerSubject {
			b.WriteString(" --discard-per-subject")
		}
		b.WriteString(" \\\n  --deny-purge --no-deny-delete --no-allow-rollup --allow-direct")
		if s.AllowAtomicPublish {
			b.WriteString(" --allow-batch")
		}
		if s.RePublish != nil {
			fmt.Fprintf(&b, " \\\n  --republish-source=%s --republish-destination=%s",
				quote(s.RePublish.Source), quote(s.RePublish.Destination))
		}
		for _, key := range metadataOf(s) {
			fmt.Fprintf(&b, " --metadata=%s", quote(key+"="+s.Metadata[key]))
		}
		for _, tag := range tags(s.Placement) {
			fmt.Fprintf(&b, " --tag=%s", quote(tag))
		}
		b.WriteString("\n\n")
	}
	fmt.Fprintf(&b, "nats kv add %s --description=%s --storage=file --history=1 --replicas=%d", plan.Bucket.Bucket,
		quote(plan.Bucket.Description), plan.Bucket.Replicas)
	for _, tag := range tags(plan.Bucket.Placement) {
		fmt.Fprintf(&b, " --tags=%s", quote(tag))
	}
	_, err := fmt.Fprintln(w, b.String())
	return err
}

// unlimited returns a limit as the tools write it: -1 for none.
func unlimited(limit int64) int64 {
	if limit == 0 {
		return -1
	}
	return limit
}

func metadataOf(s jetstream.StreamConfig) (keys []string) {
	for key := range s.Metadata {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func tags(p *jetstream.Placement) []string {
	if p == nil {
		return nil
	}
	return p.Tags
}

// The resources of the JetStream controller, jetstream.nats.io/v1beta2. Field names are those of
// its types (nats-io/nack, pkg/jetstream/apis/jetstream/v1beta2).
type (
	nackResource struct {
		APIVersion string    `yaml:"apiVersion"`
		Kind       string    `yaml:"kind"`
		Metadata   nackNames `yaml:"metadata"`
		Spec       any       `yaml:"spec"`
	}
	nackNames  struct{ Name string }
	nackStream struct {
		Name               string            `yaml:"name"`
		Description        string            `yaml:"description"`
		Subjects           []string          `yaml:"subjects"`
		Storage            string            `yaml:"storage"`
		Retention          string            `yaml:"retention"`
		Discard            string            `yaml:"discard"`
		DiscardPerSubject  bool              `yaml:"discardPerSubject,omitempty"`
		Replicas           int               `yaml:"replicas"`
		MaxAge             string            `yaml:"maxAge,omitempty"`
		MaxBytes           int64             `yaml:"maxBytes"`
		MaxMsgs            int64             `yaml:"maxMsgs"`
		MaxMsgsPerSubject  int64             `yaml:"maxMsgsPerSubject"`
		DuplicateWindow    string            `yaml:"duplicateWindow,omitempty"`
		Placement          *nackPlacement    `yaml:"placement,omitempty"`
		RePublish          *nackRePublish    `yaml:"republish,omitempty"`
		DenyPurge          bool              `yaml:"denyPurge"`
		AllowDirect        bool              `yaml:"allowDirect"`
		AllowAtomicPublish bool              `yaml:"allowAtomicPublish,omitempty"`
		Metadata           map[string]string `yaml:"metadata,omitempty"`
	}
	nackPlacement struct {
		Tags []string `yaml:"tags"`
	}
	nackRePublish struct {
		Source      string `yaml:"source"`
		Destination string `yaml:"destination"`
	}
	nackBucket struct {
		Bucket      string         `yaml:"bucket"`
		Description string         `yaml:"description"`
		Storage     string         `yaml:"storage"`
		History     int            `yaml:"history"`
		Replicas    int            `yaml:"replicas"`
		Placement   *nackPlacement `yaml:"placement,omitempty"`
	}
)

func nackPlaced(p *jetstream.Placement) *nackPlacement {
	if p == nil {
		return nil
	}
	return &nackPlacement{p.Tags}
}

func planNACK(w io.Writer, plan broker.Plan) error {
	write := func(comment, kind, name string, spec any) error {
		name = strings.ToLower(strings.ReplaceAll(name, "_", "-")) // a name of Kubernetes
		out, err := yaml.Marshal(nackResource{"jetstream.nats.io/v1beta2", kind, nackNames{name}, spec})
		if err == nil {
			_, err = fmt.Fprintf(w, "---\n%s%s", comment, out)
		}
		return err
	}
	for _, s := range append(slices.Clone(plan.Streams), broker.PlannedStream{StreamConfig: plan.Dead}) {
		spec := nackStream{Name: s.Name, Description: s.Description, Subjects: s.Subjects, Storage: "file", Retention: "limits",
			Discard: "new", DiscardPerSubject: s.DiscardNewPerSubject,
			Replicas: s.Replicas, MaxBytes: unlimited(s.MaxBytes), MaxMsgs: unlimited(s.MaxMsgs),
			MaxMsgsPerSubject: unlimited(s.MaxMsgsPerSubject), Placement: nackPlaced(s.Placement), DenyPurge: s.DenyPurge,
			AllowDirect: s.AllowDirect, AllowAtomicPublish: s.AllowAtomicPublish, Metadata: s.Metadata}
		if s.MaxAge > 0 {
			spec.MaxAge = s.MaxAge.String()
		}
		if s.Duplicates > 0 {
			spec.DuplicateWindow = s.Duplicates.String()
		}
		if s.RePublish != nil {
			spec.RePublish = &nackRePublish{s.RePublish.Source, s.RePublish.Destination}
		}
		if err := write(closedComment(s), "Stream", s.Name, spec); err != nil {
			return err
		}
	}
	b := plan.Bucket
	return write("", "KeyValue", b.Bucket, nackBucket{b.Bucket, b.Description, "file", 1, b.Replicas, nackPlaced(b.Placement)})
}

func closedComment(s broker.PlannedStream) string {
	if !s.Closed {
		return ""
	}
	return "# Closed: it gets no more events. Remove it once every consumer and subscriber has read it.\n"
}

// planTerraform writes resources of the provider nats-io/jetstream, with the attributes of its
// documentation (docs/resources).
func planTerraform(w io.Writer, plan broker.Plan) error {
	var b strings.Builder
	for _, s := range append(slices.Clone(plan.Streams), broker.PlannedStream{StreamConfig: plan.Dead}) {
		b.WriteString(closedComment(s))
		fmt.Fprintf(&b, "resource \"jetstream_stream\" %q {\n", resourceName(s.Name))
		set := func(name string, value any) { fmt.Fprintf(&b, "  %s = %s\n", name, hcl(value)) }
		set("name", s.Name)
		set("description", s.Description)
		set("subjects", s.Subjects)
		set("storage", "file")
		set("retention", "limits")
		set("discard", "new")
		if s.DiscardNewPerSubject {
			set("discard_new_per_subject", true)
		}
		set("replicas", int64(s.Replicas))
		set("max_age", wholeSeconds(s.MaxAge))
		set("max_bytes", unlimited(s.MaxBytes))
		set("max_msgs", unlimited(s.MaxMsgs))
		set("max_msgs_per_subject", unlimited(s.MaxMsgsPerSubject))
		if s.Duplicates > 0 {
			set("duplicate_window", wholeSeconds(s.Duplicates)) // whole seconds: nothing depends on it
		}
		set("deny_purge", s.DenyPurge)
		set("allow_direct", s.AllowDirect)
		if s.AllowAtomicPublish {
			set("allow_atomic", true)
		}
		if s.RePublish != nil {
			set("republish_source", s.RePublish.Source)
			set("republish_destination", s.RePublish.Destination)
		}
		if t := tags(s.Placement); len(t) > 0 {
			set("placement_tags", t)
		}
		if len(s.Metadata) > 0 {
			b.WriteString("  metadata = {\n")
			for _, key := range metadataOf(s.StreamConfig) {
				fmt.Fprintf(&b, "    %s = %s\n", key, hcl(s.Metadata[key]))
			}
			b.WriteString("  }\n")
		}
		b.WriteString("}\n\n")
	}
	k := plan.Bucket
	fmt.Fprintf(&b, "resource \"jetstream_kv_bucket\" %q {\n  name = %s\n  description = %s\n", resourceName(k.Bucket), hcl(k.Bucket),
		hcl(k.Description))
	fmt.Fprintf(&b, "  storage = \"file\"\n  history = 1\n  replicas = %d\n", k.Replicas)
	if t := tags(k.Placement); len(t) > 0 {
		fmt.Fprintf(&b, "  placement_tags = %s\n", hcl(t))
	}
	b.WriteString("}\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// resourceName returns a name of Terraform for the name of a stream.
func resourceName(name string) string { return "tidings_" + strings.ReplaceAll(name, "-", "_") }

// wholeSeconds rounds up to whole seconds.
func wholeSeconds(d time.Duration) int64 { return int64(math.Ceil(d.Seconds())) }

// hcl returns a value in Terraform's language. A template of Terraform begins with ${ or %{.
func hcl(value any) string {
	switch v := value.(type) {
	case string:
		return strings.NewReplacer("${", "$${", "%{", "%%{").Replace(strconv.Quote(v))
	case []string:
		var all []string
		for _, s := range v {
			all = append(all, hcl(s))
		}
		return "[" + strings.Join(all, ", ") + "]"
	}
	return fmt.Sprint(value)
}
