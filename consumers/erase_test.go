package consumers_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestARedactionChangesTheLettersThatItNamesAlone: tenant 2 has a letter with the same content.
func TestARedactionChangesTheLettersThatItNamesAlone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `WITH consumer AS (
		INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('c', 'EVENTS-0', 9)
		) INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
			event_id, event_type, event_version, headers, payload, error, cause)
		SELECT 'c', n, 'EVENTS-0', tenant, type, n, gen_random_uuid(), 'created', 1, '{}', convert_to(body, 'UTF8'), 'e ' || body,
			'c ' || body
		  FROM unnest('{1,1,1,2,1}'::int[], '{a,a,b,a,a}'::text[], '{secret 1,public 2,secret 3,secret 4,header 5}'::text[])
		       WITH ORDINALITY AS u(tenant, type, body, n)`); err != nil {
		t.Fatal(err)
	}
	letters := func() (all []string) {
		t.Helper()
		rows, _ := pool.Query(t.Context(), `SELECT concat_ws(', ', convert_from(payload, 'UTF8'), headers ->> 'h', error, cause)
			FROM consumer_dead_letters ORDER BY id`)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	redact := func(dryRun bool) int {
		t.Helper()
		n, err := consumers.RedactDeadLetters(t.Context(), pool, 1, dryRun,
			func(aggregateType string, payload []byte, headers map[string][]string) (*consumers.RedactedLetter, error) {
				switch {
				case aggregateType == "a" && bytes.HasPrefix(payload, []byte("secret")):
					return &consumers.RedactedLetter{Payload: []byte("gone"), Headers: headers, Content: true}, nil
				case bytes.HasPrefix(payload, []byte("header")):
					return &consumers.RedactedLetter{Payload: payload, Headers: map[string][]string{"h": {"x"}}}, nil
				}
				return nil, nil
			})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := letters()
	if n := redact(true); n != 2 || !cmp.Equal(letters(), before) {
		t.Errorf("a dry run names %d letters, and leaves %q", n, letters())
	}
	if n := redact(false); n != 2 {
		t.Errorf("redacted %d letters, want 2", n)
	}
	const erased = "erased with the content"
	want := []string{"gone, " + erased + ", " + erased, "public 2, e public 2, c public 2", "secret 3, e secret 3, c secret 3",
		"secret 4, e secret 4, c secret 4", `header 5, ["x"], e header 5, c header 5`}
	if diff := cmp.Diff(want, letters()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	n, err := consumers.DropDeadLetters(t.Context(), pool, 1, "b", false, "ann", "asked",
		func(payload []byte) bool { return strings.HasPrefix(string(payload), "secret") })
	if left := letters(); err != nil || n != 1 || len(left) != 4 || left[2] != want[3] {
		t.Errorf("dropped %d letters, %v, left are %q", n, err, left)
	}
}
