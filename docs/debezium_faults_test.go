//go:build faults

package docs_test

import (
	"context"
	"encoding/binary"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
)

// connector stands in for Debezium: it reads the log through a slot with pgoutput, and publishes
// the payloads of new rows of outboxevent.
type connector struct {
	*move
	marked atomic.Bool // it has read the marker
	back   atomic.Bool // the writers are switched back
}

// read publishes the rows that were committed since the last call.
func (c *connector) read(ctx context.Context) error {
	rows, _ := c.owner.Query(ctx, `SELECT data FROM pg_logical_slot_get_binary_changes('debezium', NULL, NULL,
		'proto_version', '1', 'publication_names', 'dbz_publication')`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return err
	}
	relations := map[uint32]string{}
	for _, b := range all { // https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
		switch b[0] {
		case 'R':
			names := strings.SplitN(string(b[5:]), "\x00", 3)
			relations[binary.BigEndian.Uint32(b[1:])] = names[0] + "." + names[1]
		case 'I':
			if relations[binary.BigEndian.Uint32(b[1:])] != "public.outboxevent" { // table.include.list
				continue
			}
			row := columns(b[6:])
			if row[3] == "moved" {
				c.marked.Store(true)
			} else if c.marked.Load() && !c.back.Load() {
				c.t.Errorf("the connector reads a row behind the marker: %q", row)
			}
			if _, err := c.js.Publish(ctx, "outbox."+row[1], []byte(row[4])); err != nil {
				return err
			}
		}
	}
	return nil
}

// columns reads TupleData.
func columns(b []byte) (all []string) {
	n := int(binary.BigEndian.Uint16(b))
	b = b[2:]
	for range n {
		kind := b[0]
		b = b[1:]
		if kind != 't' {
			all = append(all, "")
			continue
		}
		size := binary.BigEndian.Uint32(b)
		all = append(all, string(b[4:4+size]))
		b = b[4+size:]
	}
	return all
}

// start runs the connector until stop.
func (c *connector) start() (stop func()) {
	return system.Start(c.t, func(ctx context.Context) error {
		for tick := time.Tick(10 * time.Millisecond); ; {
			if err := c.read(context.WithoutCancel(ctx)); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick:
			}
		}
	})
}

// TestTheMoveFromDebezium runs from-debezium.md forth and back, with a stand-in for the connector.
// One of the writers deletes its row in the same transaction, as many services do.
func TestTheMoveFromDebezium(t *testing.T) {
	t.Parallel()
	m := startMove(t, "from-debezium.md", testkit.Business(t).In(t, "public"))
	if _, err := m.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OLD", Subjects: []string{"outbox.>"}}); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile("from-your-own-outbox.md") // step 1 is there
	if err != nil {
		t.Fatal(err)
	}
	m.declare(blocks(string(content), "yaml")[0], strings.ReplaceAll(blocks(string(content), "sh")[0], "shop_app", m.login))
	m.exec(`CREATE TABLE outboxevent (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
		type varchar(255) NOT NULL, payload jsonb)`)
	m.exec(`GRANT SELECT, INSERT, DELETE ON outboxevent TO ` + m.login)
	m.exec(`CREATE PUBLICATION dbz_publication FOR ALL TABLES`)
	m.exec(`SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')`)
	const keeps = `INSERT INTO outboxevent VALUES (gen_random_uuid(), 'Order', $1::bigint::text, 'paid', ` +
		`jsonb_build_object('id', $1::bigint, 'version', $2::bigint))`
	const deletes = keeps + "\n" +
		`DELETE FROM outboxevent WHERE aggregateid = $1::bigint::text AND payload ->> 'version' = $2::bigint::text`
	stopWriters := m.write(keeps, deletes)
	c := &connector{move: m}
	stopConnector := c.start()
	m.changed()

	m.run("CREATE UNLOGGED TABLE")
	testkit.Eventually(t, "the marker", func() (bool, error) { return c.marked.Load(), nil })
	m.changed()
	stopConnector()
	stopRelay := m.relay()
	m.changed()

	c.back.Store(true)
	m.run("DROP TABLE outboxevent")
	m.changed()
	m.untilZero("FROM tidings.outbox_messages")
	stopRelay()
	stopConnector = c.start()
	m.changed()
	stopWriters()
	stopConnector()
	if err := c.read(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.check("OLD", m.broker.Config().StreamName(0))
}
