// Marks an order as paid, and appends the event in the same transaction: node writer.mjs ORDER
import { argv, env } from 'node:process';
import { fileURLToPath } from 'node:url';
import pg from 'pg';

/** Marks the order as paid. `schema` is the outbox's. It reports whether the order has changed. */
export async function pay(client, order, schema = 'tidings') {
  await client.query('BEGIN');
  try {
    // First the state: another change of the order waits here for its lock.
    const { rows } = await client.query(
      `UPDATE orders SET status = 'paid', version = version + 1 WHERE id = $1 AND status <> 'paid' RETURNING id, status, version::int`, [order]);
    if (rows.length > 0) {
      await client.query(
        `INSERT INTO ${client.escapeIdentifier(schema)}.outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
         VALUES ($1, $2, $3, $4, $5)`, [1, 'order', String(order), 'paid', JSON.stringify(rows[0])]);
    }
    await client.query('COMMIT');
    return rows.length > 0;
  } catch (error) {
    await client.query('ROLLBACK');
    throw error;
  }
}

if (argv[1] === fileURLToPath(import.meta.url)) {
  const client = new pg.Client(env.DATABASE_URL);
  await client.connect();
  console.log(await pay(client, argv[2]) ? 'paid' : 'paid before');
  await client.end();
}
