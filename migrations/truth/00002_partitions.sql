-- +goose Up
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- outbox_partitions_apart refuses two partitions that share a slot unless one of them is closing. Two relays would publish the slot's events to two
-- streams, in no order. It looks when the transaction ends, because a resize first adds the new partitions and then lets the old ones close. The
-- lock is for transactions that do not see each other's rows. Marks change none of the columns that call it.
-- +goose StatementBegin
CREATE FUNCTION outbox_partitions_apart() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  other int;
BEGIN
  PERFORM pg_advisory_xact_lock(x'74647074'::bigint); -- "tdpt"
  SELECT o.partition INTO other FROM outbox_partitions p JOIN outbox_partitions o
      ON o.partition <> p.partition AND NOT o.closing AND o.first_slot <= p.last_slot AND p.first_slot <= o.last_slot
   WHERE p.partition = NEW.partition AND NOT p.closing LIMIT 1;
  IF FOUND THEN
    RAISE exclusion_violation USING CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME,
      MESSAGE = format('partitions %s and %s share slots, and neither is closing', least(NEW.partition, other), greatest(NEW.partition, other));
  END IF;
  RETURN NULL;
END $$;
-- +goose StatementEnd
-- contract: the function is new
REVOKE ALL ON FUNCTION outbox_partitions_apart() FROM PUBLIC;
CREATE CONSTRAINT TRIGGER apart AFTER INSERT OR UPDATE OF first_slot, last_slot, closing ON outbox_partitions
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NOT NEW.closing) EXECUTE FUNCTION outbox_partitions_apart();

-- trouble: why the partition's relay publishes nothing, at trouble_at; NULL after a mark. refused: not before an operator has repaired something.
ALTER TABLE outbox_partitions ADD COLUMN trouble text, ADD COLUMN refused boolean, ADD COLUMN trouble_at timestamptz;
GRANT UPDATE (trouble, refused, trouble_at) ON outbox_partitions TO tidings_relay;
