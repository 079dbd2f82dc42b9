-- The owner of the database runs this once.
CREATE TABLE bookmarks (
    tenant_id bigint NOT NULL,
    user_id   text   NOT NULL,
    post_id   text   NOT NULL,
    note      text   NOT NULL,
    version   bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (tenant_id, user_id, post_id)
);
GRANT SELECT, INSERT, UPDATE ON bookmarks TO bookmarks_service;
