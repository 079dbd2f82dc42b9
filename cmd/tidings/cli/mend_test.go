package cli

// damages are all types of differences that verify can find in a projection.
var damages = []string{
	// pairs: missing, unknown to the truth, with another version, in another state, at another
	// place
	`DELETE FROM edge_lists WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 LIMIT 3)`,
	`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		VALUES (1, 'follow', 900001, 900002, true, 1, now()), (7, 'follow', 1, 2, false, 1, now())`,
	`UPDATE edge_lists SET version = version + 5 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists
		ORDER BY from_id::bigint, to_id::bigint OFFSET 5 LIMIT 3)`,
	`UPDATE edge_lists SET version = 0 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists
		ORDER BY from_id::bigint, to_id::bigint OFFSET 10 LIMIT 3)`,
	`UPDATE edge_lists SET active = NOT active WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists
		ORDER BY from_id::bigint, to_id::bigint OFFSET 15 LIMIT 3)`,
	`UPDATE edge_lists SET positioned_at = positioned_at + interval '1h'
		WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists
		ORDER BY from_id::bigint, to_id::bigint OFFSET 20 LIMIT 3)`,
	// accounts: wrong on either side, missing, unknown to the truth
	`UPDATE edge_counts SET incoming = incoming + 7 WHERE object_id IN ('3', '4')`,
	`UPDATE edge_counts SET outgoing = outgoing + 7 WHERE object_id IN ('4', '5')`,
	`DELETE FROM edge_counts WHERE object_id IN ('6', '7')`,
	`INSERT INTO edge_counts (tenant_id, kind, object_id, incoming) VALUES (1, 'follow', 900003, 2)`,
	// comments: missing, unknown to the truth, with another content, state, version or count
	`DELETE FROM child_lists WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path LIMIT 3)`,
	`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state,
		version, created_at, updated_at, visible, visible_descendants, shown)
	 SELECT tenant_id, kind, gen_random_uuid(), object_id, parent_id, 'damage', '0000000000000ffffffff0', author_id, body, author_state,
	 moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
	   FROM child_lists ORDER BY object_id, path LIMIT 1`,
	`UPDATE child_lists SET body = body || ' damaged' WHERE child_id IN (SELECT child_id FROM child_lists WHERE visible
		ORDER BY object_id DESC, path LIMIT 2)`,
	`UPDATE child_lists SET version = version + 3 WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id DESC, path DESC
		LIMIT 2)`,
	`UPDATE child_lists SET visible_descendants = visible_descendants + 1, shown = true
		WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path DESC LIMIT 2)`,
	`UPDATE child_lists SET visible = NOT visible, shown = NOT visible OR visible_descendants > 0
		WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY child_id LIMIT 2)`,
	// threads: wrong counts, unknown to the truth, with other settings
	`UPDATE child_buckets SET visible = visible + 1 WHERE ctid IN (SELECT ctid FROM child_buckets ORDER BY object_id LIMIT 2)`,
	`DELETE FROM child_buckets WHERE object_id = (SELECT max(object_id) FROM child_buckets)`,
	`UPDATE child_totals SET total = total + 1 WHERE object_id = (SELECT min(object_id) FROM child_totals)`,
	`INSERT INTO child_settings (tenant_id, kind, object_id, locked, premoderated, title, version)
		VALUES (1, 'comment', 900004, true, false, '', 1)`,
	// histories: missing latest versions
	`DELETE FROM follow_history WHERE (follower_id, followee_id) IN (SELECT follower_id, followee_id FROM follow_history ORDER BY 1, 2
		LIMIT 2)`,
	`DELETE FROM comment_history WHERE comment_id IN (SELECT comment_id FROM comment_history ORDER BY 1 LIMIT 2)`,
}
