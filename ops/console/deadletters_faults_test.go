//go:build faults

package console_test

import (
	"strings"
	"testing"
)

func TestAHundredThousandDeadLettersAreOnThePageInTime(t *testing.T) {
	h := start(t)
	h.exec(t, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, attempts,
		       event_id, inserted_at, slot, last_error, cause, dead_at)
		SELECT g, 7, 'post', g, 'made', 1, jsonb_build_object('text', repeat('x', 300)), now(), now(), 11, gen_random_uuid(), now(), 0, 'e',
		CASE WHEN g % 1000 = 0 THEN 'rare ' || g ELSE 'often' END, now()
		  FROM generate_series(1, 100000) g`)
	for _, token := range []string{h.Tokens.Reader, h.Tokens.TenantReader} {
		r := h.signIn(t, token)
		a := quickPage(t, r, "/console/dead-letters")
		if n := strings.Count(a.body, "/console/dead-letters/letters?"); n != 50 {
			t.Errorf("%d groups on the page", n)
		}
		seen := n(a)
		for next := a.link("Next page"); next != ""; {
			a = page(t, r, next)
			seen += n(a)
			if next = ""; strings.Contains(a.body, `rel="next"`) {
				next = a.link("Next page")
			}
		}
		if seen != 101 {
			t.Errorf("%d groups on all pages", seen)
		}
		often := page(t, r, "/console/dead-letters?q=often").says("more than 10,000")
		quickPage(t, r, often.link("often")).says("more than 10,000", "Next page")
	}
}
